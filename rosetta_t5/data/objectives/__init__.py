"""Training objectives as SeqIO preprocessors: span corruption, prefix LM, UL2."""
