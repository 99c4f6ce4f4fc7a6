"""Plain PyTorch models with example inputs, targets and loss, ready for ``flexsearch import flexsearch.zoo:NAME``.

Each model has two names: its ``nn.Module`` class, and a builder that returns a :class:`ZooModel`. Builders are seeded,
so every rank of a run builds the same weights, inputs and targets; parameters are float32. Dropout is 0 unless asked
for, so that runs are comparable.
"""

from __future__ import annotations

from flexsearch.zoo.base import ZooModel, build
from flexsearch.zoo.cnn import VGG16, AlexNet, LeNet, ResNet50, alexnet, lenet, resnet50, resnet101, vgg16
from flexsearch.zoo.inception import InceptionV3, inception_v3
from flexsearch.zoo.large import gpt3, llama7b, llama70b, llama405b
from flexsearch.zoo.mixture import Mixtral, mixtral
from flexsearch.zoo.mlp import MLP, mlp
from flexsearch.zoo.rnn import NMT, RNNLM, RNNTC, nmt, rnnlm, rnntc
from flexsearch.zoo.transformer import BERT, GPT2, Llama, bert, bert_large, gpt2

__all__ = [
    "BERT",
    "GPT2",
    "MLP",
    "NMT",
    "RNNLM",
    "RNNTC",
    "VGG16",
    "AlexNet",
    "InceptionV3",
    "LeNet",
    "Llama",
    "Mixtral",
    "ResNet50",
    "ZooModel",
    "alexnet",
    "bert",
    "bert_large",
    "build",
    "gpt2",
    "gpt3",
    "inception_v3",
    "lenet",
    "llama7b",
    "llama70b",
    "llama405b",
    "mixtral",
    "mlp",
    "nmt",
    "resnet50",
    "resnet101",
    "rnnlm",
    "rnntc",
    "vgg16",
]
