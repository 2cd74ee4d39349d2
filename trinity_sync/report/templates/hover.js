// Values on hover, on a tap and by the arrow keys. What a page says without scripts, the titles in its pictures, is replaced.
"use strict";
(() => {
  const ROWS = 10, NEAR = 24;
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  document.body.append(tip);

  const make = (svg, name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    svg.append(element);
    return element;
  };
  const onPage = (svg, x, y) => new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
  const inPicture = (svg, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());

  function show(text, at) {
    tip.textContent = text;
    tip.hidden = false;
    const left = at.x + 14 + tip.offsetWidth > innerWidth ? at.x - 14 - tip.offsetWidth : at.x + 14;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(8, Math.min(at.y + 14, innerHeight - tip.offsetHeight - 8))}px`;
  }

  // The points of a curve: where they are, and what they say.
  function points(group) {
    const places = [...group.children].flatMap((shape) => {
      if (shape.localName === "circle") return [[+shape.getAttribute("cx"), +shape.getAttribute("cy")]];
      const corners = (shape.getAttribute("points") || shape.getAttribute("d")).match(/-?[\d.]+,-?[\d.]+/g);
      return corners.map((pair) => pair.split(",").map(Number)).filter((_, at) => group.dataset.style !== "steps" || at % 2 === 0);
    });
    return group.dataset.values.split("|").map((value, at) => {
      const cut = value.indexOf(" ");
      return { x: places[at][0], y: places[at][1], at: value.slice(0, cut), text: value.slice(cut + 1) };
    });
  }

  function nearest(list, x) {
    let low = 0, high = list.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle].x < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - list[low - 1].x < list[low].x - x ? list[low - 1] : list[low];
  }

  function curves(svg, groups) {
    const all = groups.map((group) => {
      const shape = group.firstElementChild, list = points(group);
      return { name: group.dataset.name, list, colour: shape.getAttribute("stroke") || shape.getAttribute("fill") };
    });
    const xs = [...new Set(all.flatMap((curve) => curve.list.map((point) => point.x)))].sort((a, b) => a - b);
    const line = make(svg, "line", { class: "cursor", y1: 0, y2: svg.viewBox.baseVal.height - 38 });
    let spots = [];

    function hide() {
      line.style.display = "none";
      spots.forEach((spot) => spot.remove());
      spots = [];
    }
    function at(x, y) {
      hide();
      const here = all.reduce((best, curve) => {
        const point = nearest(curve.list, x);
        return !best || Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best;
      }, null);
      const found = all.map((curve) => {
        const point = nearest(curve.list, here.x);
        return { ...curve, point, texts: curve.list.filter((other) => other.x === point.x).map((other) => other.text) };
      }).filter((one) => Math.abs(one.point.x - here.x) < NEAR);
      const height = (one) => (y === undefined ? 0 : Math.abs(one.point.y - y));
      const kept = new Set([...found].sort((a, b) => height(a) - height(b)).slice(0, ROWS));
      const rows = found.filter((one) => kept.has(one)).map((one) => {
        const more = one.texts.length > 4 ? ", ..." : "";
        const elsewhere = one.point.at === here.at ? "" : ` (${svg.dataset.x} ${one.point.at})`;
        return `${one.name}: ${one.texts.slice(0, 4).join(", ")}${more}${elsewhere}`;
      });
      if (found.length > kept.size) rows.push(`and ${found.length - kept.size} more`);
      line.style.display = "";
      line.setAttribute("x1", here.x);
      line.setAttribute("x2", here.x);
      spots = [...kept].map((one) => make(svg, "circle", { class: "spot", cx: one.point.x, cy: one.point.y, r: 4.5, fill: one.colour }));
      show([`${svg.dataset.x} ${here.at}`, ...rows].join("\n"), onPage(svg, here.x, y === undefined ? here.y : y));
      return xs.indexOf(here.x);
    }
    hide();
    let place = -1;
    return {
      point: (position) => { place = at(position.x, position.y); },
      move: (by) => { place = Math.max(0, Math.min(xs.length - 1, place < 0 ? 0 : place + by)); at(xs[place]); },
      hide,
    };
  }

  function shapes(svg, list) {
    let place = -1;
    const hide = () => list.forEach((shape) => shape.classList.remove("chosen"));
    return {
      point: (position, event) => {
        place = list.indexOf(event.target);
        if (place < 0) tip.hidden = true; else show(event.target.dataset.tip, { x: event.clientX, y: event.clientY });
      },
      move: (by) => {
        hide();
        place = Math.max(0, Math.min(list.length - 1, place < 0 ? 0 : place + by));
        list[place].classList.add("chosen");
        const box = list[place].getBBox();
        show(list[place].dataset.tip, onPage(svg, box.x + box.width, box.y + box.height));
      },
      hide,
    };
  }

  for (const svg of document.querySelectorAll("figure > svg")) {
    const groups = [...svg.querySelectorAll("g.curve")];
    svg.querySelectorAll(".hover, .curve title").forEach((element) => element.remove());
    const told = [...svg.querySelectorAll("rect > title")].map((title) => {
      const shape = title.parentElement;
      shape.dataset.tip = title.textContent;
      title.remove();
      return shape;
    });
    if (!groups.length && !told.length) continue;
    const picture = groups.length ? curves(svg, groups) : shapes(svg, told);
    const hide = () => { picture.hide(); tip.hidden = true; };
    const point = (event) => picture.point(inPicture(svg, event), event);
    svg.tabIndex = 0;
    svg.addEventListener("pointermove", point);
    svg.addEventListener("pointerdown", point);
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") hide();
      if (!by) return;
      event.preventDefault();
      picture.move(by);
    });
    addEventListener("scroll", hide, { passive: true, capture: true });
  }
})();
