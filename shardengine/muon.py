"""``shardengine.muon``: Muon with AdamW for the rest as one torch optimizer, of `optim/muon_with_adamw.py`."""

from shardengine.optim import MuonWithAdamW, hidden_matrices

__all__ = ["MuonWithAdamW", "hidden_matrices"]
