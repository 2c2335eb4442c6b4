"""Device names and specs, and the detection of accelerators."""
