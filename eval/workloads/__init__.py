"""What is sent: sessions of token ids, all fixed before the first request."""
