"""Stores, in which accepted events become durable: the `Store` protocol and its implementations."""
