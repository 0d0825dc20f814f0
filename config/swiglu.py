# (silu(x Wg) * x W1) W2, as Llama
#   python train.py config/swiglu.py
ffn = 'swiglu'
