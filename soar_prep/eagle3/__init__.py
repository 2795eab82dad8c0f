"""The mathematics of `soar-prep train-draft`: an EAGLE-3 draft for speculative decoding, in reading order.

draft.py      the network: three states of the target and the next token's embedding in, guesses out
positions.py  positions for RoPE, stretched so that a draft trained on short samples serves long contexts
attention.py  step k sees step 0 causally, and of steps 1 to k only its own keys
ttt.py        training-time test: seven steps, each fed what the draft itself gave, and the teacher's rows
loss.py       KL at first, acceptance rate in the end
export.py     the directory that SGLang loads
"""
