"""How well a trained model predicts: by token position, at any length, with any effort of the solver."""

from mesanet.evaluation.evaluate import evaluate as evaluate
from mesanet.evaluation.run import evaluate_run as evaluate_run
