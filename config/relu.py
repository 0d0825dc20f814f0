# relu(x W1) W2
#   python train.py config/relu.py
ffn = 'relu'
