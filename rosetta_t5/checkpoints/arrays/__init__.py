"""Arrays: read lazily, renamed, resized, and converted between parameter trees."""
