"""Arrays: read lazily, renamed, converted between parameter trees, initialized leaf by leaf."""
