"""Which cached block is given up next: `queue` keeps the order, `ranking` and `survival` say what a block is worth."""
