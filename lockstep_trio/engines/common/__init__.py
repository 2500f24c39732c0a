"""What more than one wire protocol needs. Knows no engine; for protocols, not for users."""
