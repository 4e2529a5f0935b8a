"""Gin files: parsed into statements, looked up by name, and bound."""
