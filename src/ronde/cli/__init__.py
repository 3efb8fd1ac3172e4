"""The `ronde` command. The only part of ronde that prints."""
