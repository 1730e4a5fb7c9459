// Runs the script of a report under Node, over a document that only keeps what it is given: `node page.js report.html`.
// The document has no address of its own, as in a notebook's frame, which refuses to change it. Opens every view and prints what each says, as JSON: the elements' classes and texts, and what charts write.
const fs = require("fs");
const html = fs.readFileSync(process.argv[2], "utf8");
const [, data] = /<script type="application\/json" id="data">(.*?)<\/script>/s.exec(html);
const [, script] = /<script>("use strict";.*?)<\/script>\n<\/body>/s.exec(html);
const written = [];
const context = new Proxy({}, {
  get: (_, name) => (name === "measureText" ? () => ({ width: 10 }) : name === "fillText" ? (text, x, y) => written.push([text, x, y])
    : name === "arc" ? (x, y) => written.push(["arc", x, y]) : () => {}),
  set: () => true,
});

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], style: {}, dataset: {}, className: "", own: "", hidden: false, clientWidth: 800, clientHeight: 600, scrollTop: 0 });
    this.classList = { add: (name) => { this.className += ` ${name}`; } };
  }
  append(...given) { this.children.push(...given); given.forEach((child) => { if (child instanceof Element) child.parent = this; }); }
  replaceChildren(...given) { this.children = []; this.append(...given); }
  replaceWith(other) { this.parent.children[this.parent.children.indexOf(this)] = other; other.parent = this.parent; }
  get textContent() { return this.own + this.children.map((child) => (child instanceof Element ? child.textContent : child)).join(""); }
  set textContent(text) { this.own = String(text); this.children = []; }
  setAttribute(name, value) { this[name] = value; }
  getBoundingClientRect() { return { width: 10, height: 10, top: 0 }; }
  getContext() { return context; }
  addEventListener() {}
  focus() {}
}

const named = { data: new Element("script") };
named.data.textContent = data;
globalThis.document = {
  getElementById: (id) => (named[id] ??= new Element("div")), createElement: (tag) => new Element(tag),
  documentElement: new Element("html"), body: new Element("body"),
};
Object.assign(globalThis, {
  ResizeObserver: class { observe() {} }, getComputedStyle: () => ({ getPropertyValue: () => "", fontFamily: "" }),
  matchMedia: () => ({ matches: false, addEventListener() {} }), addEventListener() {}, requestAnimationFrame() {},
  history: { replaceState() { throw new Error("about:srcdoc has no address"); } }, location: { hash: "", protocol: "about:" }, devicePixelRatio: 1, innerWidth: 1200, innerHeight: 800,
});

const texts = (element, wanted) => element.children.filter((child) => child instanceof Element)
  .flatMap((child) => [...(child.className.split(" ").includes(wanted) || child.tag === wanted ? [child.textContent] : []), ...texts(child, wanted)]);
const views = {};
globalThis.tried = (names, open) => {
  for (const name of names) {
    written.length = 0;
    open(name);
    const element = named.views.children.at(-1);
    views[name] = { text: element.textContent, options: texts(element, "option"), labels: texts(element, "label"), values: texts(element, "value"),
      legends: texts(element, "legend"), panes: texts(element, "pane").length, facts: texts(element, "facts"), written: [...written] };
  }
};
eval(script.replace(/start\(\);\s*\}\)\(\);\s*$/, "start(); tried(VIEWS.map(([name]) => name), openTab); })();"));
console.log(JSON.stringify(views));
