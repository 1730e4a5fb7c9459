"""What operators mean: their derivatives, batching, cost and sharding, declared by family."""
