"""Which cached block is given up next: `queue` keeps them in the order of what they are worth.

`ranking` is what a policy answers, `survival` estimates worth, and `duel` chooses between that and simpler orders.
"""
