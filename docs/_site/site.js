// What the theme's own script leaves without a name, or out of the keyboard's reach.
(() => {
  "use strict";
  const name = (nav) =>
    nav.ariaLabel ||
    document.getElementById(nav.getAttribute("aria-labelledby"))?.textContent.trim() ||
    "Code";

  function mend() {
    document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
    const seen = new Map();
    for (const nav of document.querySelectorAll("nav")) {
      const label = nav.dataset.name ??= name(nav);
      const key = label.toLowerCase();
      const count = (seen.get(key) ?? 0) + 1;
      seen.set(key, count);
      nav.removeAttribute("aria-labelledby");
      nav.setAttribute("aria-label", count > 1 ? `${label} ${count}` : label);
    }
    for (const box of document.querySelectorAll(".md-typeset__scrollwrap, pre, pre > code")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    }
  }

  let waiting = 0;
  const later = () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(mend);
  };
  new MutationObserver(later).observe(document.body, { childList: true, subtree: true });
  addEventListener("resize", later);
  addEventListener("toggle", later, true);
  mend();
})();
