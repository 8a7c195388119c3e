"""SGLang's attention backends, reading live tokens only."""
