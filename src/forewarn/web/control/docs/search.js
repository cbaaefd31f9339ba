// Shows what holds all the words that were typed: in the page and in the list beside it.
const field = document.getElementById("search");
const told = document.getElementById("found");
const places = [...document.querySelectorAll("[data-words]")];
const search = () => {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const place of places) {
    place.hidden = !words.every((word) => place.dataset.words.includes(word));
    if (!place.hidden && place.tagName === "SECTION") count += 1;
  }
  told.textContent = words.length ? `${count} found` : "";
};
field.addEventListener("input", search);
search();
