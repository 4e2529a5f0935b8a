"""Arrays of a checkpoint: read lazily, renamed, and converted between parameter trees."""
