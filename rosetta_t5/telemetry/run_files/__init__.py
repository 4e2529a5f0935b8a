"""The files about a run in MODEL_DIR: model-info.txt and run-log.jsonl."""
