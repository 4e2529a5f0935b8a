"""`rosetta-t5 finetune`: a model and a file of rows → a gin file with every choice, and its run."""
