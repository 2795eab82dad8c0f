"""`soar-prep train-draft`: an EAGLE-3 draft for speculative decoding, in reading order.

supervision.py  which tokens of a conversation the assistant wrote
data.py         samples, and the batches that every rank shares and resumes
vocab.py        the draft's vocabulary: the tokens written most
target.py       the frozen target's states, embeddings and head
draft.py        the network: three states of the target and the next token's embedding in, guesses out
positions.py    positions for RoPE, stretched so that a draft trained on short samples serves long contexts
attention.py    step k sees step 0 causally, and of steps 1 to k only its own keys
loss.py         KL at first, the rate of acceptance in the end
ttt.py          training-time test: seven steps, each fed what the draft itself gave; the teacher's rows
metrics.py      acceptance figures
decode.py       real speculative decoding, chain and tree, for measuring
export.py       the directory that SGLang loads
"""
