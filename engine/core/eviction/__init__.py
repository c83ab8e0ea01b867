"""Choice of the cached block to evict next: `queue` keeps blocks in the order of their worth.

`ranking` is the interface of a policy, `survival` estimates worth, and `duel` chooses between `survival` and simpler
orders.
"""
