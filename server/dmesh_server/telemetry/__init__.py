"""What the server tells its operators."""
