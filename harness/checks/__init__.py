"""One check a file; each says what it proves and which paths it must have taken."""
