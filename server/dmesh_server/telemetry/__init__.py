"""Telemetry of the server: logs, metrics and spans."""
