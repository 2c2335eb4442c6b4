"""Process-wide state of the SDK: initialize, membership, shutdown, exit hooks; composed once per process."""
