// @ts-check
/** Changes of the open workflow, each of them one step of the page's undo. */

const RULES = "HalfsafeLayerRules";
const GAP = 40;

/** @param {any} app @param {() => void} change */
export function undoable(app, change) {
  app.canvas.emitBeforeChange();
  change();
  app.graph.setDirtyCanvas(true, true);
  app.canvas.emitAfterChange();
}

/** @param {any} graph @param {string} type @param {[number, number]} pos */
export function addNode(graph, type, pos) {
  const node = window.LiteGraph.createNode(type);
  node.pos = pos;
  graph.add(node);
  return node;
}

/** Give a widget a value. @param {any} node @param {string} name @param {any} value */
export function setWidget(node, name, value) {
  const widget = node.widgets.find((/** @type {any} */ one) => one.name === name);
  widget.value = value;
  widget.callback?.(value);
}

/** @param {any} from @param {number} output @param {any} to @param {number} input */
export function link(from, output, to, input) {
  from.connectSlots(from.outputs[output], to, to.inputs[input]);
}

/** Put rules into the Layer Rules node before a node, which is made where there is none. @param {any} app @param {any} node @param {string} rules */
export function keepRules(app, node, rules) {
  undoable(app, () => {
    const slot = node.inputs.findIndex((/** @type {any} */ input) => input.name === "rules");
    const present = node.getInputNode(slot);
    const holder = present?.comfyClass === RULES ? present : addNode(node.graph, RULES, [node.pos[0] - 440, node.pos[1]]);
    if (holder !== present) {
      holder.pos = [node.pos[0] - holder.size[0] - GAP, node.pos[1]];
      setWidget(holder, "preset", "none");
      link(holder, 0, node, slot);
    }
    setWidget(holder, "rules", rules);
  });
}
