"""Checkpoints whose bytes nobody has all of: every participant holds a part, and only storage is shared.

Participants agree on what each of them holds, all make the same plan of it, stage the bytes that somebody
else's objects need, and write their own objects. They talk through the destination alone.
"""
