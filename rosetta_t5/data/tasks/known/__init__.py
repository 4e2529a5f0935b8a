"""The known tasks as tables: pretraining, GLUE and other supervised tasks."""
