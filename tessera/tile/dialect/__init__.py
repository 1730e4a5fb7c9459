"""The tile dialect: operations, index expressions, functions, a builder, text, and the reference interpreter."""
