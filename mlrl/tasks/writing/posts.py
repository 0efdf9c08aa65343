"""Posts of our own in the manner of an advice forum: the sample of the task tldr."""

POSTS = (
    "TITLE: My flatmate never washes up and now we have ants\n\nPOST: I share a flat with a friend from school. For "
    "the first months it was great, but since winter he leaves every pan in the sink until there is nothing left to "
    "cook with. I washed up for both of us twice, then I stopped, and now ants walk along the kitchen wall. I brought "
    "it up over dinner and he laughed and said that he works longer hours than I do. That is true, but he also plays "
    "games until three in the morning. Our lease runs for seven more months. I do not want to lose the friendship "
    "over dishes. How do I get him to take this seriously?\n\nTL;DR:",
    "TITLE: Should I take the job in another city?\n\nPOST: I am 29 and work for a small company that repairs lifts. "
    "Last week a bigger firm, four hours away by train, offered me a post with a third more pay and a training "
    "programme that I have wanted for years. My partner has just been promoted here and cannot move before next "
    "summer. My parents are well, but they are getting old. The new firm wants an answer by Friday and does not allow "
    "working from home in the first year. We could see each other every second weekend. I keep making lists and each "
    "list ends in a draw.\n\nTL;DR:",
    "TITLE: I lent my cousin money for a van and he bought a motorbike\n\nPOST: Two years ago my cousin wanted to "
    "start a delivery business. I lent him four thousand from my savings, with a note that both of us signed. He paid "
    "back small sums for half a year. Then I saw pictures of him on a new motorbike, and the payments ended. When I "
    "asked, he said that the bike is for the business because it is faster in traffic. There is no business that I "
    "can find. My aunt says that family should not talk about money. I need the sum for a course in September.\n\n"
    "TL;DR:",
    "TITLE: Our dog is afraid of the new baby\n\nPOST: We have a nine-year-old collie who used to sleep at the foot "
    "of our bed. Five weeks ago our daughter was born. Since then he hides behind the sofa whenever she cries, and he "
    "has twice refused his food. He never growls, he only shakes. The vet found nothing wrong and told us to give him "
    "a quiet room of his own. We did, but he scratches at the door because he wants to be with us. My husband thinks "
    "it will pass. I am tired, I feel guilty, and I would like to hear from people who have been through this.\n\n"
    "TL;DR:",
    "TITLE: I won a prize with a photo that my friend took\n\nPOST: Last summer four of us went hiking, and we passed "
    "my camera around. In autumn I sent five of the pictures to a contest of the local paper. One of them won second "
    "prize, three hundred and a printed page. Only at the party did my friend point out that she had pressed the "
    "button for that one while I was tying my shoes. I chose it, edited it and paid the entry fee, but the moment was "
    "hers. I offered her half of the money. She wants the paper to print her name. The editor says that this would "
    "break the rules.\n\nTL;DR:",
    "TITLE: Neighbour's tree drops walnuts on our car\n\nPOST: The family next door owns an old walnut tree, and a "
    "third of its crown hangs over our parking place. Every October the nuts fall on the car; there are eleven dents "
    "by now. They are kind people who bring us a basket of walnuts each year, and they refuse to cut the branches "
    "because their grandfather planted the tree. Our insurance does not pay for nuts. We cannot park in the street "
    "without a permit, and the waiting list for one is two years long. A net would cost as much as the repairs.\n\n"
    "TL;DR:",
    "TITLE: How do I tell my choir that I want to stop singing solos?\n\nPOST: I have sung in the same choir for "
    "eleven years, and for the last six the conductor has given me most of the solos. At first I was proud. Lately I "
    "cannot sleep before concerts, my hands go cold, and I make mistakes in lines that I know by heart. A doctor told "
    "me to cut down on stress. When I hinted at a break, the conductor said that nobody else could do the Christmas "
    "programme, which is in nine weeks. Two younger singers are good enough in my opinion. I love the choir and want "
    "to stay in the second row.\n\nTL;DR:",
    "TITLE: My sister plans her wedding on the day of my final exam\n\nPOST: My sister got engaged in spring and "
    "booked a farmhouse for the only Saturday in June that was free. It happens to be the day of my last oral exam, "
    "which decides whether I can begin my training as a nurse. The school moves exams only for illness. The farmhouse "
    "is three hours away. If all goes well I could arrive for the dinner, but I would miss the ceremony, and she "
    "asked me to be her witness. She cried when I told her and says that I am choosing a test over her.\n\nTL;DR:",
    "TITLE: Found a wallet, returned it, and now I am accused\n\nPOST: On Monday I found a wallet on the bus. There "
    "was an address in it, so I walked over after work and put it into the letter box because nobody was at home. On "
    "Wednesday a man rang at my door. The driver had told him who picked it up. He says that two hundred in cash are "
    "missing and that he will go to the police unless I pay. There was no cash when I found it, and I have no "
    "witness. The bus has cameras, but the company keeps the films for three days only.\n\nTL;DR:",
    "TITLE: I taught my grandmother to use a phone and she now calls ten times a day\n\nPOST: For her eightieth "
    "birthday we gave my grandmother her first smartphone. I spent a weekend writing large notes for her: how to "
    "call, how to send a picture, how to find the radio. She learned it faster than I thought. Now she rings me ten "
    "times a day, in lessons and at night, mostly to tell me what the neighbour's cat is doing. I love that she is "
    "happy. I am also behind with my studies, and when I do not answer she worries and calls my mother at work.\n\n"
    "TL;DR:",
)
