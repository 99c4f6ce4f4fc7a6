import torch, torch.nn.functional as F, copy
from functools import partial
from torch import nn
from tests.ranks import pool
from tests.small_models import case
from flexsearch.runtime.parallel import distribute, parallelize
from flexsearch.strategy import Strategy, StrategyFile
from flexsearch.strategy.baselines import baseline
from flexsearch.topology import Topology
from flexsearch.graph.importer import import_model, import_with_constants

class Net(nn.Module):
    def __init__(s):
        super().__init__(); torch.manual_seed(0)
        s.emb=nn.Embedding(7,6); s.a=nn.Linear(6,8); s.bn=nn.BatchNorm1d(8); s.d=nn.Dropout(0.5); s.b=nn.Linear(8,3)
    def forward(s,x): return s.b(s.d(F.relu(s.bn(s.a(s.emb(x))))))
def batch():
    g=torch.Generator().manual_seed(1)
    return torch.randint(7,(8,),generator=g), torch.randint(3,(8,),generator=g)
def go(file):
    m=Net().double(); s=Strategy.from_file(StrategyFile.model_validate_json(file))
    step=parallelize(m,s,loss=F.cross_entropy)
    opt=torch.optim.AdamW(step.parameter_groups(decay=0.1),lr=0.05)
    x,y=batch(); r=[]
    for i in range(2):
        out=step((x,y),outputs=(i==0)); n=step.clip_grad_norm_(0.1); opt.step(); opt.zero_grad(); r.append((out.loss.item(),n.item(),None if out.outputs is None else tuple(out.outputs.shape)))
    lo,hi=step.feed.range_of(step.rank,5)
    out=step((x[:5],y[:5]),samples=5); n=step.clip_grad_norm_(0.1); opt.step(); opt.zero_grad(); r.append((out.loss.item(),n.item()))
    with step.evaluating():
        r.append(step.forward(x,everything=True)); r.append(step.forward(x[:5],samples=5,everything=True))
    return r, step.state_dict()
if __name__=="__main__":
    x,y=batch()
    m=Net().double(); m.d.p=0.0
    for name in ("data-parallel","megatron","fsdp"):
        for n in (1,2,3):
            mm=Net().double()
            f=baseline(name if n>1 else "single",import_model(mm,x,F.cross_entropy,targets=y),Topology.load(f"ethernet-1g:{n}")).to_file().model_dump_json()
            a=pool(n).run(go,f)
            for r,st in a:
                ev=Net().double(); ev.load_state_dict(st); ev.eval()
                print(name,n,[q for q in r[:3]],(ev(x)-r[3]).abs().max().item(),(ev(x[:5])-r[4]).abs().max().item())
