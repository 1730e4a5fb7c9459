"""Where values lie and how long: aliasing, order, writes in place, offloading, strides."""
