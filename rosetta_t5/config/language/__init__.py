"""Gin files: parsed into statements, their names resolved, their values bound."""
