"""`soar-prep quantize`: a Hugging Face causal LM in, an NVFP4 checkpoint out, in reading order.

quantize.py     the road, one decoder layer after another
budget.py       what it will take in memory and on disk, before it begins
layers.py       which linears are quantized, and which of them share an input
hessian.py      second moments of those inputs, and the factor of their inverse
solve.py        GPTQ: round column by column, move each error onto the columns still to come; triton_solve.py on a GPU
refine.py       after it, block by block again, codes and scales; triton_refine.py on a GPU
report_page.py  report.html
"""
