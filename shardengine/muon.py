"""``shardengine.muon``: Muon, with AdamW for other parameters, as one optimizer (`optim/muon_with_adamw.py`)."""

from shardengine.optim import MuonWithAdamW, hidden_matrices

__all__ = ["MuonWithAdamW", "hidden_matrices"]
