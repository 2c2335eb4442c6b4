"""Where accepted events become durable: the `Store` protocol and its implementations."""
