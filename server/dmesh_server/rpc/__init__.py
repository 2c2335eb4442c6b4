"""gRPC: thin servicers that convert, ask the runtime, and convert back."""
