//! A future with something done to what it comes to. Unlike an `async` block that awaits, it has the future in it once.

use pin_project_lite::pin_project;
use std::pin::Pin;
use std::task::{Context, Poll};

pin_project! {
    struct Mapped<F, M> {
        #[pin]
        future: F,
        map: Option<M>,
    }
}

impl<R, F: Future, M: FnOnce(F::Output) -> R> Future for Mapped<F, M> {
    type Output = R;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<R> {
        let this = self.project();
        let output = std::task::ready!(this.future.poll(cx));
        let map = this.map.take().expect("a future is not polled after it has ended");
        Poll::Ready(map(output))
    }
}

/// The future of a load, say, from the future that a call was given.
pub(crate) fn mapped<R, F>(
    future: F,
    map: impl FnOnce(F::Output) -> R + Send + 'static,
) -> Pin<Box<dyn Future<Output = R> + Send>>
where
    F: Future + Send + 'static,
{
    Box::pin(Mapped { future, map: Some(map) })
}
