"""`soar-prep train-draft`: an EAGLE-3 draft for speculative decoding, in reading order.

train.py        the road: every step by name
supervision.py  which tokens of a conversation the assistant wrote
data.py         samples, and the batches that every rank shares and resumes
regenerate.py   the target's own answers in place of those in the data
vocab.py        the draft's vocabulary: the tokens written most
target.py       the frozen target's states, embeddings and head
capture.py      the same states from disk: `soar-prep capture`
draft.py        the network: three states of the target and the next token's embedding in, guesses out
positions.py    positions for RoPE, stretched so that a draft trained on short samples serves long contexts
attention.py    step k sees step 0 causally, and of steps 1 to k only its own keys; triton_attention.py on a GPU
loss.py         KL at first, the rate of acceptance in the end; triton_loss.py on a GPU
ttt.py          training-time test: seven steps, each fed what the draft itself gave; the teacher's rows
learner.py      an update: precision, optimizer, several processes
metrics.py      acceptance figures
evaluate.py     held-out samples: those figures, by position too, and real decoding
decode.py       real speculative decoding, chain and tree, for measuring
hf_target.py    a transformers model as the target of it, with its cache
export.py       the directory that SGLang loads
report_page.py  report.html
"""
