"""The native protocol, generated from `protos/dmesh/v1` by `make protos`. Do not edit."""
