"""The functional transforms a user calls: grad, vjp, jvp, vmap and what is made of them."""
