// A list of any length that only draws what is seen. Arrow keys move, Enter chooses. `mark(i)` gives the classes of a
// row; they can change without the row being drawn again, so that pointing at rows never takes one from under a click.

class VirtualList {
  constructor(label, height, draw, { chosen, entered, mark }) {
    this.height = height;
    this.draw = draw;
    this.chosen = chosen;
    this.entered = entered || (() => {});
    this.mark = mark || (() => "");
    this.under = -1;
    this.count = 0;
    this.active = -1;
    this.rows = el("div", { class: "rows" });
    this.element = el("div", { class: "list", tabindex: "0", role: "listbox", "aria-label": label }, this.rows);
    this.element.addEventListener("scroll", () => this.later());
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.element.addEventListener("click", (event) => this.at(event, (i) => { this.active = i; this.chosen(i); this.paint(); }));
    this.element.addEventListener("mousemove", (event) => this.at(event, (i) => this.enter(i)));
    this.element.addEventListener("mouseleave", () => this.enter(-1));
    new ResizeObserver(() => this.later()).observe(this.element);
  }

  at(event, then) {
    const i = Math.floor((event.clientY - this.rows.getBoundingClientRect().top) / this.height);
    if (i >= 0 && i < this.count) then(i);
  }

  enter(i) {
    if (i === this.under) return;
    this.under = i;
    this.entered(i);
  }

  show(count) {
    this.count = count;
    this.active = Math.min(this.active, count - 1);
    this.rows.style.height = `${count * this.height}px`;
    this.paint();
  }

  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.paint(); });
  }

  paint() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.height) - 8);
    const last = Math.min(this.count, Math.ceil((this.element.scrollTop + this.element.clientHeight) / this.height) + 8);
    const made = [];
    for (let i = first; i < last; i++) {
      const row = this.draw(i);
      row.className = this.classes(i);
      row.dataset.i = i;
      row.id = `${this.name()}-${i}`;
      row.setAttribute("role", "option");
      row.setAttribute("aria-selected", String(i === this.active));
      row.style.top = `${i * this.height}px`;
      made.push(row);
    }
    this.rows.replaceChildren(...made);
    if (this.active >= first && this.active < last) this.element.setAttribute("aria-activedescendant", `${this.name()}-${this.active}`);
  }

  classes(i) {
    return `row ${this.mark(i)}${i === this.active ? " active" : ""}`;
  }

  remark() {
    for (const row of this.rows.children) row.className = this.classes(Number(row.dataset.i));
  }

  name() {
    return this.element.id || "list";
  }

  reveal(i, middle = true) {
    const top = i * this.height, room = this.element.clientHeight;
    const seen = top >= this.element.scrollTop && top + this.height <= this.element.scrollTop + room;
    if (seen) return;
    this.element.scrollTop = middle ? top - room / 3 : top < this.element.scrollTop ? top : top + this.height - room;
    this.element.scrollLeft = 0;
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.height) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.count, End: this.count };
    if (event.key in moves && this.count) {
      this.active = Math.max(0, Math.min(this.count - 1, this.active + moves[event.key]));
      this.reveal(this.active, false);
      this.enter(this.active);
      this.paint();
    } else if (event.key === "Enter" && this.active >= 0) {
      this.chosen(this.active);
      this.paint();
    } else return;
    event.preventDefault();
  }
}
