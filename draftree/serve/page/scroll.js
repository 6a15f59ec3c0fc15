// The log follows the text as it grows, unless the reader has scrolled up.

const NEAR_END = 48; // pixels

export class Scroll {
  constructor(log, content) {
    this.log = log;
    this.isFollowing = true;
    this.lastTop = 0;
    log.addEventListener("scroll", () => this.look());
    const observer = new ResizeObserver(() => this.isFollowing && this.toEnd());
    for (const element of [log, content]) observer.observe(element);
  }

  follow() {
    this.isFollowing = true;
    this.toEnd();
  }

  toEnd() {
    this.log.scrollTo(0, this.log.scrollHeight);
  }

  /** Growing text moves its end away; only going up is the reader's wish. */
  look() {
    const { scrollTop, scrollHeight, clientHeight } = this.log;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END;
    if (isAtEnd) this.isFollowing = true;
    else if (scrollTop < this.lastTop) this.isFollowing = false;
    this.lastTop = scrollTop;
  }
}
