from browser.test_memory import *
@pytest.mark.paired
def test_sweep(comfy):
    n=0; bad=[]; lo={}
    for name, workflow in workflows()[1:]:
        try: run = comfy.evaluate(THERE_AND_BACK, [workflow, n % 2 == 0])
        except Exception as e: bad.append((name, str(e)[:300])); continue
        loaders = loaders_in(run["before"])
        if not loaders: continue
        n+=1
        if "Left out" in run["said"] or "as it was" in run["said"]: lo[name]=run["said"][:200]
        if missing_files(run["found"][0], run["before"]) is None:
            f=run["found"]; 
            if {k for k in run["before"]} != {*run["after"]} or run["back"]!=run["before"]: bad.append((name,"changed"))
            continue
        try: judge(name, run)
        except AssertionError as e: bad.append((name, run["said"], str(e)[:600]))
    import json; open(f"/tmp/mem/sweep-{comfy.vue}.json","w").write(json.dumps([n,bad,lo],indent=1))
