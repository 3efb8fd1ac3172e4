"""Parts of the launcher that scripts import from here."""
