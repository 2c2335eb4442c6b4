"""Tokens, certificates and the private certificate authority of a cluster."""
