"""What one scheduler process keeps and does at the safe point."""
