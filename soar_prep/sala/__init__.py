"""MiniCPM-SALA, a decoder of sparse and of linear attention layers, as a model of transformers.

Importing this package is enough: AutoConfig and AutoModelForCausalLM then know model_type minicpm_sala, and the
checkpoint's remote code is not needed. In reading order:

configuration.py    config.json: shapes, scalings, which layer mixes how, what sparse layers choose
lightning.py        linear attention with a fixed decay: by recurrence, by chunks, one step
infllm.py           sparse attention: pooled keys, block scores, the blocks a query reads
triton_*.py         both on a GPU
modeling.py         the model
"""

from transformers import AutoConfig, AutoModelForCausalLM

from soar_prep.sala.configuration import MiniCPMSALAConfig
from soar_prep.sala.modeling import MiniCPMSALAForCausalLM

AutoConfig.register(MiniCPMSALAConfig.model_type, MiniCPMSALAConfig, exist_ok=True)
AutoModelForCausalLM.register(MiniCPMSALAConfig, MiniCPMSALAForCausalLM, exist_ok=True)
