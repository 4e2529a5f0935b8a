"""Serves models: requests share the steps of a model, and join and leave it at any step."""

from rosetta_t5.serving.engine import RequestError
from rosetta_t5.serving.served_model import Piece, ServedModel, Token
