// Making elements. Text is only ever set as text: nothing here, or elsewhere, parses a string as HTML.

const $ = (id) => document.getElementById(id);

function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function choice(label, options, chosen, changed) {
  const made = el("select", { "aria-label": label, onchange: () => changed(Number(made.value)) });
  options.forEach((text, i) => made.append(el("option", { value: i, text })));
  made.value = chosen;
  return made;
}

function segments(names, chosen, changed) {
  const made = el("span", { class: "segments", role: "group" });
  names.forEach((name, i) => {
    const press = () => {
      [...made.children].forEach((b, j) => b.setAttribute("aria-pressed", String(i === j)));
      changed(i);
    };
    made.append(el("button", { type: "button", text: name, "aria-pressed": String(i === chosen), onclick: press }));
  });
  return made;
}

const link = (text, clicked) => el("button", { type: "button", class: "link", text, onclick: clicked });

// Colours and what they mean: [css class or variable, text].
function legend(...entries) {
  return el("span", { class: "legend" }, ...entries.map(([colour, text]) => {
    const swatch = el("i");
    swatch.style.background = `var(--${colour})`;
    return el("span", {}, swatch, text);
  }));
}

// --- numbers ---

const counted = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

function scaled(number, unit) {
  if (!number) return `0 ${unit}`;
  for (const [prefix, scale] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (number >= scale) return `${(number / scale).toPrecision(3)} ${prefix}${unit}`;
  }
  return `${Number(number.toPrecision(3))} ${unit}`;
}

function duration(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toPrecision(3)} ms`;
  return `${(seconds * 1e6).toPrecision(3)} µs`;
}

function memory(bytes) {
  for (const [unit, scale] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (bytes >= scale) return `${(bytes / scale).toPrecision(3)} ${unit}`;
  }
  return `${bytes} B`;
}

const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

// --- the note that follows the pointer ---

function showTooltip(event, head, lines) {
  const tip = $("tooltip");
  tip.replaceChildren(el("div", { class: "head", text: head }));
  for (const text of lines) if (text) tip.append(el("div", { class: "line", text }));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18}px`;
}

const hideTooltip = () => { $("tooltip").hidden = true; };
